"""What `allhands bench ddp` is asked to measure. Needs no torch."""

from __future__ import annotations

from difflib import get_close_matches

import msgspec

from ..errors import fail

__all__ = ["CONTESTANTS", "MODELS", "Course", "course"]

# Small enough for two cores and a minute, large enough that gradients fill several buckets. The last is the transformer
# with 16 tokens in place of 512: as many gradients of the same size come of them, and what computing varies by, which
# is a share of what it takes, hides less of what they take to move.
MODELS = ("mlp", "cnn", "transformer", "transformer-16")

# Who trains, in the order in which they are shown: our class on our backend, torch's on ours, torch's on Gloo; the
# module itself on all ranks at once, with a barrier after each backward pass and nothing else between them, and with
# nothing at all; and on rank 0 alone while the others sleep.
CONTESTANTS = ("allhands", "torch", "gloo", "lockstep", "apart", "single")


class Course(msgspec.Struct, frozen=True):
    """What the ranks are to train. ``who`` limits the contestants, for the measurement of memory."""

    ranks: int
    models: tuple[str, ...]
    rounds: int
    who: tuple[str, ...] = CONTESTANTS
    operation: str = "ddp"
    peers: tuple[str, ...] = ()


def course(ranks: int, models: str, rounds: int) -> Course:
    """Return what the options ask for; raises invalid-argument for a model that there is not."""
    names = tuple(name.strip() for name in models.split(","))
    for name in names:
        if name not in MODELS:
            near = get_close_matches(name, MODELS, n=1)
            raise fail(
                "invalid-argument",
                f"--models {models!r}: there is no model {name!r}" + (f"; did you mean {near[0]!r}?" if near else ""),
                who="allhands bench ddp",
                fix=f"name some of {', '.join(MODELS)}",
            )
    return Course(ranks, names, rounds)
