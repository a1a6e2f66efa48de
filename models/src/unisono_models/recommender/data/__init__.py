"""Rows of clicks and ratings, from files of several kinds, by place in one global order."""
