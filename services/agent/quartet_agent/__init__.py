"""Runs next to the engines of one host."""
