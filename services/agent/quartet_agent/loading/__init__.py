"""Weights: which models are in this node's memory, and getting others there before they are needed."""
