"""Generated messages and stubs of the package ``quartet.v1`` (``libs/rpc/generate.py``). Never edited."""
