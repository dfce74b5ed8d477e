"""What a block's forward saves for its backward, and what becomes of weights there."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from shardwise.planner.memory.tape import ACTIVATIONS, GATHERED, GRADIENTS, Tape

if TYPE_CHECKING:
    from shardwise.planner.memory.block_tape import Block

# What becomes of the gradient of a weight. sharded: it stays in the compute type until FSDP2 reduces it. first: it is
# cast to fp32, and kept. more: cast, added to what is there, and dropped. bucket: cast, and copied into DDP's bucket.
# moved: cast, added to what is there, which then moves into DDP's bucket. later: there is none yet (a pipeline's
# backward of inputs alone).
Gradient = Literal["sharded", "first", "more", "bucket", "moved", "later"]

_GRAPH = ("cast", "product of", "scattered", "sent back")
SMALLEST = 2**16  # bytes of a saved tensor, below which offload leaves it (`parallel/offload.py`)


def saved_by(block: Block) -> list[tuple[str, float, bool]]:
    """(name, bytes, whether `selective` keeps it, too) of what the backward needs, in the order of the forward."""
    b = block
    changed = b.rope or b.qk_norm > 0  # what attention takes is not what the projection gave
    sent = b.context == "ulysses"  # nor is it what attention sees
    gathered = b.context == "allgather"
    whole = b.whole if b.parallel else b.stream
    ups = [("gate", b.inner, True), ("silu", b.inner, False)] if b.gated else []
    return [
        ("block input", b.stream, True),
        ("attention_norm", b.statistics, False),
        ("qkv input", whole, False),
        ("qkv", 0.0 if sent or (gathered and (changed or b.grouped)) else b.query + 2 * b.key, True),
        ("qk_norm", b.qk_norm + b.query * (b.qk_norm > 0 and b.grouped), False),
        ("query", b.query * (changed or b.grouped) * (not sent), False),
        ("key", b.key * changed * (not sent and not gathered), False),
        ("whole keys and values", 2 * b.key * b.parts * gathered, False),
        ("whole queries, keys and values", (b.query + 2 * b.key) * sent, False),
        ("attention", b.query, True),
        ("logsumexp", b.sums, True),
        ("attention in order", b.query * (sent or gathered), False),
        ("mlp_norm", b.statistics, False),
        ("attention.out", b.stream, False),
        ("mlp input", whole, False),
        *ups,
        ("up", b.inner, True),
        ("product", b.inner, False),
    ]


class SavedTape(Tape):
    """Of one micro-batch and one block."""

    def __init__(self, block: Block, policy: str, gradient: Gradient, offloaded: bool):
        super().__init__()
        self.b, self.policy, self.gradient, self.offloaded = block, policy, gradient, offloaded
        self.saved = {name: (size, product) for name, size, product in self._saved()}
        self.host: dict[str, float] = {}

    def _saved(self) -> list[tuple[str, float, bool]]:
        return saved_by(self.b)

    def _kept_products(self) -> list[tuple[str, float, float]]:
        """(name, bytes, bytes of this rank's part of the sum over ranks) of those whose result `selective` keeps for
        nobody."""
        b = self.b
        product, part = (b.whole, b.stream) if b.parallel else (b.stream, 0.0)
        return [("out", product, part), ("down", product, part)]

    def keep(self) -> None:
        """What the forward leaves."""
        for name, (size, product) in self.saved.items():
            if self._stays(name, product):
                self._keep(name, size)
        if self.policy == "selective":  # products that nobody needs again, until the block's end
            self._keep_attention()
            for name, result, part in self._kept_products():
                self._keep(f"product of {name}", result)
                self._keep(f"scattered {name}", part)
        if self.policy == "none":
            for name, elements in self._weights():
                self._cast(name, elements)
        self.drop()
        self.moments.clear()

    def _keep_attention(self) -> None:
        b = self.b
        if not self.saved["qkv"][0]:
            self._keep("qkv", b.query + 2 * b.key)
        if b.context == "ulysses":
            self._keep("received", b.query + 2 * b.key)
            self._keep("sent back", b.query)
        if b.context == "ring":  # what attention gave in each round, as on the first rank of the ring
            self._keep("rounds", (b.query + b.sums) * (b.parts - 1) / 2)

    def drop(self, *names: str) -> None:
        """A backward of inputs alone keeps its graph with all that is saved."""
        if self.gradient == "later":
            names = tuple(name for name in names if name not in self.saved and not name.startswith(_GRAPH))
        super().drop(*names)

    def _stays(self, name: str, product: bool) -> bool:
        if self.policy == "full":
            return name == "block input"
        return self.policy == "none" or product

    def _keep(self, name: str, size: float) -> None:
        if self.offloaded and size >= SMALLEST and self.policy != "selective":
            self.host[name] = size
        else:
            self.make(name, size, ACTIVATIONS)

    def _weights(self) -> list[tuple[str, float]]:
        b = self.b
        gate = [("gate", b.up)] if b.gated else []
        return [("qkv", b.qkv), ("out", b.out), *gate, ("up", b.up), ("down", b.down)]

    def _cast(self, name: str, elements: float) -> None:
        b = self.b
        if name == "qkv" and b.selected:
            elements = b.own_qkv
        if b.casts or (name == "qkv" and b.selected):
            self.make(f"cast {name}", b.width * elements, GATHERED)

    def _save(self, name: str) -> None:
        size, product = self.saved[name]
        if not self._stays(name, product):
            self.make(name, size)

    def _gather(self, name: str) -> None:
        self.make("gathered", self.b.whole)
        self._save(name)
        self.drop("gathered")

    def _product(self, name: str) -> None:
        b = self.b
        if self.policy == "selective":
            return
        self.make(f"product of {name}", b.whole if b.parallel else b.stream)
        if b.parallel:
            self.make("in parts", b.whole)
            self.make(f"scattered {name}", b.stream)
            self.drop("in parts", f"product of {name}")

    def fetch(self, *names: str) -> None:
        """Back from the host."""
        for name in names:
            if name in self.host:
                self.make(name, self.host.pop(name))

    def _weight(self, name: str, elements: float) -> None:
        """The gradient of a weight, before that of its product's input."""
        if self.gradient != "later":
            self.make(f"gradient of {name}", self.b.width * elements, GATHERED)

    def _weight_done(self, name: str, elements: float) -> None:
        gradient = self.gradient
        if gradient == "later":
            return
        self.drop(f"cast {name}")
        if gradient == "sharded":
            return
        if self.b.width < 4:
            self.make(
                f"wide gradient of {name}", 4 * elements, GRADIENTS if gradient in ("first", "bucket") else GATHERED
            )
            self.drop(f"gradient of {name}")
        if gradient in ("more", "moved"):
            self.drop(f"wide gradient of {name}", f"gradient of {name}")
        if gradient == "bucket":
            self.drop(f"wide gradient of {name}", f"gradient of {name}")
        if gradient == "moved":
            self.now[GRADIENTS] -= max(4, self.b.width) * elements

    def _product_backward(self, name: str, elements: float, made: str, size: float, *, done: list[str]) -> None:
        """Of one product: the gradient of its weight, `made` as that of its input, and what it alone had waited for."""
        self._weight(name, elements)
        self.make(made, size)
        self._done(*done)
        self._weight_done(name, elements)

    def _done(self, *names: str) -> None:
        """Nobody needs them any more, unless the gradients of weights are still to come."""
        if self.gradient != "later":
            self.drop(*names)

    def _whole_gradient(self) -> None:
        if self.b.parallel:
            self.make("received gradient", self.b.whole)
            self.make("whole gradient", self.b.whole)
            self.drop("received gradient")

    def _scatter(self, *names: str) -> None:
        """The gradient of a gathered input: a part of the sum each, under the first name."""
        b = self.b
        if b.parallel:
            self.make("in parts", b.whole)
            self.make("part", b.stream)
            self.drop("in parts", *names)
            self.rename("part", names[0])
