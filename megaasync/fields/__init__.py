"""What fields of the config may hold: bounds of numbers, choices by name, and the error that a wrong value gives.

Standard library only, and below every other package, so that schedules and optimizers can describe their own keys.
"""

from megaasync.fields.choices import NameOf, OneOf, hints_of
from megaasync.fields.error import ConfigError
from megaasync.fields.ranges import Range, check_ranges

__all__ = ["ConfigError", "NameOf", "OneOf", "Range", "check_ranges", "hints_of"]
