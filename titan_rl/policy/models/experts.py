"""A layer's mixture of experts: the router's choice of a few for every token, or the one that a generator made.

Each expert is a feed-forward with matrices of its own, as in the checkpoint: names translate and layouts do not.
Every rank computes every expert, of no token if need be: FSDP reduces the gradient of all or waits for ever.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torchtitan.models.common import Linear
from torchtitan.models.common.feed_forward import FeedForward
from torchtitan.protocols.module import Module, ModuleList


class Experts(FeedForward):
    """A subclass because torchtitan's functions know where a layer's feed-forward is."""

    @dataclass(kw_only=True, slots=True)
    class Config(FeedForward.Config):
        """`w1`, `w2` and `w3` are those of each expert; the router has as many outputs as there are."""

        router: Linear.Config
        chosen: int
        normed: bool

    def __init__(self, config: Config) -> None:
        Module.__init__(self)
        one = FeedForward.Config(w1=config.w1, w2=config.w2, w3=config.w3)
        self.router = config.router.build()
        self.experts = ModuleList(one.build() for _ in range(config.router.out_features))
        self.chosen, self.normed = config.chosen, config.normed
        self.routes: Tensor | None = None
        """[T, chosen], the experts of the next rows; None, or -1 in it: those that the router likes best."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [1, T, D]. The shares are the router's own in either case, and it learns by them."""
        rows = x.flatten(0, 1)
        scores = self.router(rows).float().softmax(-1)
        chosen = scores.topk(self.chosen, sorted=False).indices
        if self.routes is not None:
            chosen = torch.where(self.routes < 0, chosen, self.routes.long())
        shares = scores.gather(-1, chosen)
        if self.normed:
            shares = shares / shares.sum(-1, keepdim=True)
        out = torch.zeros_like(rows)
        for number, expert in enumerate(self.experts):
            places, which = (chosen == number).nonzero(as_tuple=True)
            out.index_add_(0, places, expert(rows[places]) * shares[places, which, None].to(rows.dtype))
        return out.view_as(x)
