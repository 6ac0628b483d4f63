"""Configuration: what may be said (``schema``), and how it is read (``load``)."""
