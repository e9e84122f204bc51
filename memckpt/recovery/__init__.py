"""Bringing a step back: what lies where, what to take, and loading it on all ranks or on none."""
