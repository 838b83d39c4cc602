"""Cap the logits at 15, for the loss, evaluation, sampling and exports alike."""

import torch

from .gpt import GPT


class Model(GPT):
    def logits(self, hidden):
        return 15 * torch.tanh(super().logits(hidden) / 15)
