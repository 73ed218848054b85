"""How counts are worded."""


def counted(count: int, thing: str) -> str:
    """The count with the word for what is counted, in the plural where it is not 1."""
    return f"{count} {thing}{'' if count == 1 else 's'}"
