"""Logits are capped at 15: the loss, evaluation, sampling and exports are of these."""

import torch

from model.gpt import GPT


class Model(GPT):
    def logits(self, hidden):
        return 15 * torch.tanh(super().logits(hidden) / 15)
