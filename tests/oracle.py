"""The objective in plain loops and float64, from the formulas of the paper; shares nothing with the package
but the model and `Completion`."""

import math

import torch


def token_logprobs(model, completion, temperature):
    ids = torch.tensor([completion.prompt.token_ids + completion.token_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0].double() / temperature
    start = len(completion.prompt.token_ids) - 1
    return torch.log_softmax(logits, -1)[start : start + len(completion.token_ids)]


def quantile(values, q):
    values = sorted(values)
    if not values:
        return -math.inf
    position = q * (len(values) - 1)
    low, high = values[math.floor(position)], values[math.ceil(position)]
    return low + (high - low) * (position - math.floor(position))


def statistics(model, completions, temperature):
    """completion -> (log-probability of each token, entropy at each token), as plain numbers."""
    result = {}
    for completion in completions:
        log_p = token_logprobs(model, completion, temperature).detach()
        chosen = [log_p[t, token].item() for t, token in enumerate(completion.token_ids)]
        result[completion] = (chosen, [-(row.exp() * row).sum().item() for row in log_p])
    return result


def stapo_loss(model, completions, temperature, *, old=None, mask_from=None, tau_p=0.002, q=0.75,
               population="candidates", s2t=True, epsilon=0.2, epsilon_high=0.28):  # fmt: skip
    """(loss, silenced tokens); `old` and `mask_from` are statistics of another policy than the model's."""
    current = statistics(model, completions, temperature)
    mask_from = mask_from or current
    candidate_entropies, all_entropies = [], []
    for completion in completions:
        for logprob, entropy in zip(*mask_from[completion], strict=True):
            all_entropies.append(entropy)
            if completion.advantage > 0 and math.exp(logprob) < tau_p:
                candidate_entropies.append(entropy)
    tau_h = quantile(candidate_entropies if population == "candidates" else all_entropies, q)
    total, kept, silenced = 0.0, 0, 0
    for completion in completions:
        log_p = token_logprobs(model, completion, temperature)
        advantage = completion.advantage
        for t, token in enumerate(completion.token_ids):
            logprob, entropy = (values[t] for values in mask_from[completion])
            if s2t and advantage > 0 and math.exp(logprob) < tau_p and entropy < tau_h:
                silenced += 1
                continue
            kept += 1
            ratio = torch.exp(log_p[t, token] - (old or current)[completion][0][t])
            clipped = min(max(ratio.item(), 1 - epsilon), 1 + epsilon_high)
            total = total + (
                ratio * advantage if ratio.item() * advantage <= clipped * advantage else clipped * advantage
            )
    return -total / kept, silenced
