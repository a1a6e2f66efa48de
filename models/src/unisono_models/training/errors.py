"""Mistakes of the user, apart from faults of the program."""


class UserError(ValueError):
    """A mistake in what the user typed, or in the data and files that it names.

    Its text names the option as the user typed it (`--data.caption`), the value, and what to do. The commands print the text
    without a traceback. Every other exception is a fault of the program and keeps its traceback.

    Example:
        raise UserError(f"--data.caption {name}: the table has no such column. It has {', '.join(columns)}")
    """
