"""Forecasts model demand and orders weight prefetch."""
