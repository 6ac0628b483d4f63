"""Decides which worker prefills and which decodes each request."""
