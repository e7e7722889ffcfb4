"""The one family of errors that a user can cause. Each message names field, value, rule and mend."""


class SpdError(Exception):
    """Anything that a user can cause and mend; entry points turn it into one line and exit code 2."""


class ConfigError(SpdError):
    """A configuration that cannot run: unknown key, wrong type, values that contradict each other."""


class DataError(SpdError):
    """Input data that breaks the slate contract."""


class ArtifactError(SpdError):
    """A ranker artifact or backbone that is missing, corrupt, or does not match what it claims."""
