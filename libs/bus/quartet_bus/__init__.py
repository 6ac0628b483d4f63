"""Messages, subjects, buses, service base and client of Quartet."""
