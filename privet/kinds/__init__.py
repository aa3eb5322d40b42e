"""Kinds of task: one file each says how rows become tokens, losses and scores."""
