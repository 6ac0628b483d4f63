"""Policies: how one worker, or a pair, is chosen among those that hard filters leave. One small class per file.

A policy is named in ``[router] policies`` by import path and built once at start with the router's ``View``; messages
can only choose among those.
"""
