"""What a user of the models can get wrong: one sentence that names the thing and what is allowed."""


class UserError(ValueError):
    """A request that cannot be served as given; the command prints the sentence and exits with 2."""
