"""Converts the results of pooling steps to embeddings and scores. Step 9 of 10 for these models. numpy only."""

import math
from dataclasses import dataclass

import numpy as np

from ..api.errors import InvalidRequestError

_LEAST_NORM = 1e-12


@dataclass(frozen=True, kw_only=True)
class EmbeddingForm:
    """The form of the embeddings that a caller asks for.

    Raises:
      InvalidRequestError: The model has no embeddings of this length.
    """

    model_dimensions: int  # length of the model's embeddings
    dimensions: int  # length of those to return: the first numbers of the model's
    is_normalized: bool = True
    is_cut_last: bool = False  # after it was normalized, so that its length is less than 1

    def __post_init__(self) -> None:
        if not 1 <= self.dimensions <= self.model_dimensions:
            raise InvalidRequestError(
                "dimensions", f"got {self.dimensions}; allowed is 1 to {self.model_dimensions} with this model."
            )

    def embedding(self, pooled: np.ndarray) -> np.ndarray:
        """Returns the embeddings [..., dimensions] float32 of results [..., D]."""
        vector = pooled if self.is_cut_last else pooled[..., : self.dimensions]
        if self.is_normalized:
            norm = np.sqrt(np.square(vector).sum(axis=-1, keepdims=True))
            vector = vector / np.maximum(norm, _LEAST_NORM)
        return vector[..., : self.dimensions]


def relevance(pooled: np.ndarray) -> float:
    """Returns the probability of "yes" from a reranker's result, the logits of "no" and "yes"."""
    no, yes = pooled.tolist()
    difference = yes - no
    if difference >= 0:
        return 1.0 / (1.0 + math.exp(-difference))
    odds = math.exp(difference)  # instead of exp(-difference), which may overflow
    return odds / (1.0 + odds)
