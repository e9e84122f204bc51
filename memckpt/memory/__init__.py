"""This node's memory of a run: slots, who may write them, whether they fit."""
