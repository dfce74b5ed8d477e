"""Attention in the tape of a block: its forward again, and its backward."""

from __future__ import annotations

from shardwise.planner.memory.saved_tape import SavedTape


class AttentionTape(SavedTape):
    def _attention_again(self) -> None:
        b = self.b
        if b.parallel:
            self.make("norm", b.stream)
            self._gather("qkv input")
        else:
            self._save("qkv input")
        self._cast("qkv", b.qkv)
        self._save("qkv")
        if not self.saved["qkv"][0] and self.policy == "full":
            self.make("qkv", b.query + 2 * b.key)
        self._save("qk_norm")
        if b.rope:
            copied = b.query if b.grouped else 0.0
            self.make("query copy", copied)
            self._rotate("query", b.query)
            self._rotate("key", b.key)
            self.drop("query copy")
        else:
            self._save("query")
            self._save("key")
        if b.context == "allgather":
            self.make("packed", 2 * b.key)
            self.make("received", 2 * b.key * b.parts)
            self._save("whole keys and values")
            self.drop("packed", "received")
        elif b.context == "ulysses":
            self.make("sent", 2 * (b.query + 2 * b.key))
            if self.policy != "selective":
                self.make("received", b.query + 2 * b.key)
            self._save("whole queries, keys and values")
            self.drop("sent", "received")
        elif b.context == "ring":
            self.make("travelling", 4 * b.key)
            self.make("wide attention", 4 / b.width * b.query)
            self.drop("travelling", "wide attention")
        if not self.saved["qkv"][0]:
            self.drop("qkv")
        self._save("attention")
        self._save("logsumexp")
        if b.context == "ulysses":
            self.make("by rank", b.query)
            self._save("attention in order")
            self.drop("by rank", "sent back")
        else:
            self._save("attention in order")
        self._cast("out", b.out)
        self._product("out")
        self.drop("norm")
        self._save("attention.out")
        self.drop("product of out", "scattered out")

    def _rotate(self, name: str, size: float) -> None:
        """In fp32: a copy, two products of each half, and their sums."""
        wide = size * (4 / self.b.width)
        self.make("wide", wide if self.b.width < 4 else 0.0)
        self.make("halves", 2 * wide)
        self.drop("halves")
        self.make("half", wide)
        self.make("turned", wide)
        self.drop("half")
        self._save(name)
        self.drop("turned", "wide")

    def _attention_backward(self) -> None:
        b = self.b
        whole = b.whole if b.parallel else b.stream
        self._whole_gradient()
        self.fetch("attention in order", "attention")
        self._product_backward("out", b.out, "by attention", b.query, done=["whole gradient", "attention in order"])
        self._attention()
        self.make("by qkv", b.query + 2 * b.key)
        self.drop("by query", "by key", "by value")
        self.fetch("qkv input")
        self._product_backward("qkv", b.qkv, "by input", whole, done=["by qkv", "qkv input"])
        self._scatter("by input")

    def _attention(self) -> None:
        b = self.b
        self.fetch("query", "key", "qkv", "whole keys and values", "whole queries, keys and values")
        if b.context == "ulysses":
            self.make("by attention by rank", b.query)
            self.drop("by attention")
            self.make("by whole", b.query + 2 * b.key)
            self.drop("by attention by rank", "attention", "logsumexp", "whole queries, keys and values")
            self.make("sent", b.query + 2 * b.key)
            self.drop("by whole")
        elif b.context == "allgather":
            whole = 2 * b.key * b.parts
            self.make("by query", b.query)
            self.make("by keys and values", whole)
            self.drop("by attention", "attention", "logsumexp", "whole keys and values", "query")
            self.make("sums", whole)
            self.drop("by keys and values")
            self.make("by whole keys and values", whole)
            self.drop("sums")
            self.make("of pieces", 3 * whole)  # each as large as the whole, and summed one after the other
            self.drop("of pieces", "by whole keys and values")
        elif b.context == "ring":
            wide = max(4, b.width) / b.width
            self.make("wide gradient", wide * b.query)
            self.make("travelling", 4 * b.key)
            self.make("parts", b.query / 2 + 2 * b.key)
            self.make("travelling gradients", 3 * wide * 2 * b.key)  # sent, received, and sent on
            self.drop("parts", "travelling", "travelling gradients")
        if b.context != "allgather":
            self.make("by query", b.query)
        self.make("by key", b.key)
        self.make("by value", b.key)
        self.drop("sent", "wide gradient", "by attention", "attention", "logsumexp", "query", "key", "qkv")
        if b.rope:
            self._turn_back("by key", b.key)
            self._turn_back("by query", b.query)

    def _turn_back(self, name: str, size: float) -> None:
        wide = size * (4 / self.b.width)
        if self.b.width < 4:
            self.make("wide", wide)
            self.drop(name)
        self.make("halves", 2 * wide)
        self.drop("halves", "wide")
        self.make("halves", wide)
        self.make("turned", wide)
        self.drop("halves")
        self.make(name, size)
        self.drop("turned")
