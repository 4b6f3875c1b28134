"""Requests on their way in: judged together, then turned into sequences."""

from __future__ import annotations

import random
from collections.abc import Container, Sequence

from palmette.constrained.vocabulary import Vocabulary

from .delivery import Delivery
from .request import EngineInfo, Request, RequestError, check_request
from .sequence import SequenceState


class Intake:
    """What an engine asks of new requests, and the numbers and seeds it gives them."""

    def __init__(self, info: EngineInfo, *, vocabulary: Vocabulary, seed: int) -> None:
        self._info = info
        self._vocabulary = vocabulary
        self._random = random.Random(seed)  # noqa: S311 - seeds of samplers, no secrets
        self._num_made = 0
        self.max_tokens = min(info.context_length, info.num_pages * info.page_size)

    def check(self, requests: Sequence[Request], *, live: Container[str], num_waiting: int) -> None:
        """Judge requests that come together.

        Raises:
            RequestError: for the first that cannot be served, or when the queue is full.
        """
        limit = self._info.limits.max_waiting
        if num_waiting + len(requests) > limit:
            raise RequestError(
                f"the queue holds {num_waiting} requests; "
                f"{len(requests)} more exceed its limit of {limit}; try again later",
                code="overloaded",
            )
        seen: set[str] = set()
        for request in requests:
            check_request(request, self._info)
            if request.request_id in live or request.request_id in seen:
                raise RequestError(
                    f"request_id: {request.request_id!r} is in use by a live request",
                    field="request_id",
                    code="duplicate_id",
                )
            seen.add(request.request_id)

    def sequence(self, request: Request, *, now: float) -> SequenceState:
        """The state of a request that was checked."""
        sampling = request.sampling
        self._num_made += 1
        stop_ids = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            stop_ids.update(self._info.eos_token_ids)
        seed = self._random.getrandbits(64) if sampling.seed is None else sampling.seed
        max_generated = self.max_tokens - len(request.prompt_ids)
        if sampling.max_new_tokens is not None:
            max_generated = min(max_generated, sampling.max_new_tokens)
        thinks = request.reasoning
        shown = () if thinks is None else (thinks.start, thinks.end)
        return SequenceState(
            request,
            arrival=self._num_made,
            seed=seed % 2**64,
            submitted_at=now,
            stop_ids=frozenset(stop_ids),
            max_generated=max_generated,
            delivery=Delivery(sampling, vocabulary=self._vocabulary, shown=shown),
        )
