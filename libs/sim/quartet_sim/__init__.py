"""Simulated engines, movers and trace readers of Quartet."""
