"""The quartet command."""
