"""What ends a command: one line for people, an exit code for scripts."""


class CommandFailed(Exception):
    """The command cannot do what it was asked; its text is the one line that says why, ``code`` its exit code."""

    def __init__(self, message: str, code: int = 1) -> None:
        super().__init__(message)
        self.code = code


class PortTaken(CommandFailed):
    """Somebody else listens where a part of the fleet must."""

    def __init__(self, port: int, whose: str, protocol: str) -> None:
        super().__init__(f"{protocol} port {port} ({whose}) is taken; stop what uses it, or add --ports any")
        self.port = port
        self.whose = whose
