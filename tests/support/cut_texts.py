"""Texts over one cache, cut into chunks, steps, steps with wrong guesses and both in one pass at
random: what a forward over a cache is held against the whole by."""

import torch

from quantkit.executor.runner.attention_context import DecodeContext, MixedContext
from quantkit.executor.runner.prompt_context import Chunk, PrefillContext
from quantkit.models.context import CausalContext
from quantkit.models.ngram_table import read_by_ids, recent_ids

AHEAD = 3
"""Tokens that are guessed in a step at most."""
_TEXTS = [torch.arange(150) * 7 % 211, torch.arange(140) * 11 % 211]


def furthest_from_whole(loaded, generator, codes=None):
    """The largest difference of two texts that are cut at random from the same texts as a whole.
    codes: of the cache."""
    cut = cut_at_random(loaded, generator)
    with torch.inference_mode():
        whole = [loaded.model(text, CausalContext([len(text)], codes=codes)) for text in _TEXTS]
    return max(float((found - expected).abs().max()) for found, expected in zip(cut, whole))


def cut_at_random(loaded, generator):
    """What the model hands out of each of two texts."""
    texts = Texts(loaded, _TEXTS)
    with torch.inference_mode():
        texts.chunk([0, 1], generator.randint(1, 9))
        while any(at < len(text) for at, text in zip(texts.at, texts.texts)):
            texts.go_on(generator)
    return [torch.cat(found) for found in texts.found]


class Texts:
    """Two texts over one cache, at any place of each."""

    def __init__(self, loaded, texts):
        self.loaded, self.texts, self.cache, self.at = (
            loaded,
            texts,
            loaded.new_cache(9, 3, AHEAD),
            [0, 0],
        )
        self.blocks, self.places = [torch.tensor([2, 4, 7]), torch.tensor([5, 1, 8])], [2, 1]
        self.found = [[], []]

    def go_on(self, generator):
        """Some steps, and then a step of one text beside a chunk of the other, or a chunk of
        both."""
        open_ones = [0, 1]
        for _ in range(generator.randint(1, 4)):
            open_ones = [one for one in open_ones if self.at[one] < len(self.texts[one])]
            if open_ones and self.loaded.config.can_roll_back and generator.random() < 0.4:
                self.guess(open_ones, generator)
            elif open_ones:
                self.step(open_ones)
        if (
            len(open_ones) == 2
            and generator.random() < 0.5
            and self.at[1] + 3 <= len(self.texts[1])
            and self.at[0] < len(self.texts[0])
        ):
            self.both(0, 1, 3)
        elif open_ones and all(self.at[one] < len(self.texts[one]) for one in open_ones):
            self.chunk(open_ones, generator.randint(1, 50))

    def chunk(self, which, most):
        lengths = [min(most, len(self.texts[one]) - self.at[one]) for one in which]
        self._run([self._chunk(one, length) for one, length in zip(which, lengths)], which, lengths)

    def step(self, which):
        """With a row of padding."""
        context = self._step(which)
        out = self.loaded.model(
            torch.stack([*(self.texts[one][self.at[one]] for one in which), torch.tensor(0)]),
            context,
        )
        self._take(which, out.split(1))

    def guess(self, which, generator):
        """A token of each text and guesses behind it, of which the first ones are right; and a row
        of padding."""
        lengths = [
            1 + min(generator.randint(0, AHEAD), len(self.texts[one]) - self.at[one] - 1)
            for one in which
        ]
        right = [generator.randint(1, length) for length in lengths]
        rows = [[one] * length for one, length in zip(which, lengths)]
        token_ids = [
            self.texts[one][self.at[one] :][:length].clone() for one, length in zip(which, lengths)
        ]
        for guessed, count in zip(token_ids, right):
            guessed[count:] += 1
        guesses = dict(zip(which, token_ids))
        context = self._step(
            [one for own in rows for one in own],
            further=[i for own in rows for i in range(len(own))],
            guesses=guesses,
        )
        out = self.loaded.model(torch.cat([*token_ids, torch.tensor([0])]), context)
        self._take(which, [part[:count] for part, count in zip(out.split([*lengths, 1]), right)])

    def both(self, stepping, other, length):
        context = MixedContext(
            self._step([stepping], padded=False),
            self._prefill([self._chunk(other, length)], [other]),
        )
        token_ids = torch.cat(
            (
                self.texts[stepping][self.at[stepping] :][:1],
                self.texts[other][self.at[other] :][:length],
            )
        )
        self._take([stepping, other], self.loaded.model(token_ids, context).split([1, length]))

    def _run(self, chunks, which, lengths):
        token_ids = torch.cat(
            [self.texts[one][self.at[one] :][:length] for one, length in zip(which, lengths)]
        )
        for _ in range(2):  # as an engine does after a failure: the second is as the first
            out = self.loaded.model(token_ids, self._prefill(chunks, which))
        self._take(which, out.split(lengths))

    def _chunk(self, one, length):
        return Chunk(self.at[one], length, self.blocks[one], self.places[one])

    def _prefill(self, chunks, which):
        def recent(count):
            known = zip(chunks, which)
            known = [(self.texts[one][: own.start + own.length], own.start) for own, one in known]
            return torch.cat([recent_ids(ids, start, count) for ids, start in known])

        return PrefillContext(self.cache, chunks, read_by_ids(recent, "cpu"))

    def _step(self, which, padded=True, further=None, guesses=()):
        """further: how far each row's token is behind those that its text has. guesses: tokens from
        there on, by text."""
        rows = [
            (self.at[one] + far, self.blocks[one], self.places[one])
            for one, far in zip(which, further or [0] * len(which))
        ]

        def recent(count):
            found = []
            for one, (at, _, _) in zip(which, rows):
                ids = self.texts[one]
                if one in guesses:
                    ids = torch.cat((ids[: self.at[one]], guesses[one]))
                found.append(recent_ids(ids[: at + 1], at, count))
            return torch.cat(found + [torch.full((1, count), -1)] * padded)

        rows += [(0, torch.zeros(3, dtype=torch.int64), 0)] if padded else []
        positions, tables, places = zip(*rows)
        size = self.cache.block_size
        slots = torch.tensor([int(blocks[at // size]) * size + at % size for at, blocks, _ in rows])
        return DecodeContext(
            self.cache,
            torch.tensor(positions),
            torch.stack(tables).int(),
            slots,
            None,
            torch.tensor(places),
            read_by_ids(recent, "cpu"),
        )

    def _take(self, which, parts):
        for one, part in zip(which, parts):
            self.found[one].append(part)
            self.at[one] += len(part)
