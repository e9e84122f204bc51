"""When to save and what to keep: pure decisions, without I/O, messages or a clock of their own.

Every rank evaluates the same policy with the same arguments and so decides the same, whatever its clock does. The save
policies are in `memckpt.policy.save`, the preserve policies in `memckpt.policy.preserve`. `EveryNSteps`, `AnyOf` and
`AllOf` are names in both, so they are used with their module's.
"""

from memckpt.policy import preserve, save
from memckpt.policy.base import describe, in_words

__all__ = ["describe", "in_words", "preserve", "save"]
