"""How do sampling parameters change the logits of a step?

One module per family of parameters, in the order in which they are applied. Log-probabilities, which change no logits,
are in `logits_processors.py`; temperature and the top-k, top-p and min-p filters, which every step's own program
applies, in `program/sampling.py`.
"""

from .bans import Bans
from .bias import Bias
from .contract import LogitsProcessor
from .min_tokens import MinTokens
from .penalties import Penalties

PROCESSORS: tuple[LogitsProcessor, ...] = (Bias(), Bans(), MinTokens(), Penalties())
