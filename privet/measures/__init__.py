"""Measures of written texts against their references, all by kept libraries (extra ``measures``)."""
