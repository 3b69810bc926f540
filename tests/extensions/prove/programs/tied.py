"""Trains a language model whose output layer shares the weight of its embedding.

Fault ``untied``: a resumed run resizes the embedding after the restore, as for a new vocabulary. That replaces the
embedding's parameter, and the output layer keeps the previous one.
"""

import torch
from common import OPTIONS, arguments, write_results
from torch import nn

import stagereg


class LanguageModel(nn.Module):
    def __init__(self, vocabulary=11, width=8):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.body = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def resize(self, vocabulary):
        weight = self.embedding.weight.detach()[:vocabulary].clone()
        self.embedding = nn.Embedding.from_pretrained(weight, freeze=False)

    def forward(self, x):
        return self.head(self.body(self.embedding(x))[0])


def main():
    args = arguments("untied")
    torch.manual_seed(0)
    model = LanguageModel()
    with stagereg.Checkpointer(args.dir, **OPTIONS) as checkpointer:
        start = checkpointer.restore({"model": model}) or 0
        if start and args.fault == "untied":
            model.resize(11)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(start + 1, args.steps + 1):
            text = torch.randint(11, (4, 7))
            optimizer.zero_grad()
            logits = model(text[:, :-1])
            nn.functional.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten()).backward()
            optimizer.step()
            checkpointer.maybe_save(step, {"model": model, "optimizer": optimizer})
    write_results(args, model=model)


if __name__ == "__main__":
    main()
