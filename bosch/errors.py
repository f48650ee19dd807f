"""The two kinds of failure a command can end with."""


class UserError(Exception):
    """The user's input is at fault: one sentence with file and dotted path; exit status 2."""


class RunError(Exception):
    """A run failed for a reason outside the user's input, such as a full disk; exit status 1."""


class LostRankError(RunError):
    """Another process of the same run has ended or hangs; the reason is to be found there."""
