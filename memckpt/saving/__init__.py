"""What goes on at a step and behind training: decide, capture, replicate, commit."""
