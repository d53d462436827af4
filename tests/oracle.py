"""Every objective in plain loops and float64, written from the papers' formulas; shares nothing
with the package but `Completion`. One sequence at a time, no padding, all logits in memory,
gradients by autograd."""

import copy
import math
from collections import Counter
from dataclasses import dataclass, field

import torch


@dataclass
class Settings:
    """The formulas' constants; defaults are STAPO's, without sampler correction."""

    tau_p: float = 0.002
    q: float = 0.75
    population: str = "candidates"
    silence: str | None = "low-entropy"
    top: float = 1.0
    aggregation: str = "token-mean"
    renormalize: bool = True
    max_length: int = 1
    token_loss: str = "clip"
    epsilon: float = 0.2
    epsilon_high: float = 0.28
    stare: tuple = (1.0, 1.0)  # omega of surprising tokens with A > 0 and with A < 0
    surprising: float = 0.1
    target_entropy: float = 0.3
    beta: float = 0.0
    entropy_coef: float = 0.0
    old_is_rollout: bool = False
    correction: str = "off"
    cap: float = 2.0
    random: dict = field(default_factory=dict)  # completion -> random number of each token


def double(model):
    return copy.deepcopy(model).double()


def token_logits(model, completion, temperature):
    """[tokens, V]: row t predicts token t of the completion."""
    ids = torch.tensor([completion.prompt.token_ids + completion.token_ids])
    start = len(completion.prompt.token_ids) - 1
    logits = model(input_ids=ids, use_cache=False).logits[0] / temperature
    return logits[start : start + len(completion.token_ids)]


def written(completion):
    """Positions of the tokens that the model wrote."""
    return [
        t
        for t in range(len(completion.token_ids))
        if completion.loss_mask is None or completion.loss_mask[t]
    ]


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
        log_p = torch.log_softmax(
            token_logits(model, completion, temperature).detach().double(), -1
        )
        chosen = [log_p[t, token].item() for t, token in enumerate(completion.token_ids)]
        result[completion] = (chosen, [-(row.exp() * row).sum().item() for row in log_p])
    return result


def masks(completions, numbers, s):
    """(kept, silenced): sets of (completion, t); tau_h."""
    tokens = [(c, t) for c in completions for t in written(c)]
    probability = {(c, t): math.exp(numbers[c][0][t]) for c, t in tokens}
    entropy = {(c, t): numbers[c][1][t] for c, t in tokens}
    candidates = [key for key in tokens if key[0].advantage > 0 and probability[key] < s.tau_p]
    population = candidates if s.population == "candidates" else tokens
    tau_h = quantile([entropy[key] for key in population], s.q)
    silenced = set(candidates) if s.silence == "all" else set()
    if s.silence == "low-entropy":
        silenced = {key for key in candidates if entropy[key] < tau_h}
    if s.silence == "high-entropy":
        above = quantile([entropy[key] for key in population], 1 - s.q)
        silenced = {key for key in candidates if entropy[key] > above}
    if s.silence == "random":
        below = quantile([s.random[c][t] for c, t in population], s.q)
        silenced = {(c, t) for c, t in candidates if s.random[c][t] < below}
    lowest = quantile(list(entropy.values()), 1 - s.top)
    return (
        {key for key in tokens if key not in silenced and entropy[key] >= lowest},
        silenced,
        tau_h,
    )


def ratios(log_p, old, tokens, level):
    """rho of each token: its own, or the geometric mean over the sequence (GSPO, eq. 7)."""
    logs = {t: log_p[t] - old[t] for t in tokens}
    if level == "gspo":
        mean = sum(logs.values()) / len(logs)
        logs = dict.fromkeys(tokens, mean)
    return {t: torch.exp(value) for t, value in logs.items()}


def policy_term(rho, log_p, old, advantage, s):
    """(what a token adds to the objective, whether the lower and the upper bound took effect)."""
    r, low, high = rho.item(), 1 - s.epsilon, 1 + s.epsilon_high
    if s.token_loss == "sapo":
        tau = 1.0 if advantage > 0 else 1.05
        return 4 / tau / (1 + torch.exp(-tau * (rho - 1))) * advantage, False, False
    if s.token_loss == "cispo":
        return min(max(r, low), high) * advantage * log_p, r < low, r > high
    if s.token_loss == "dppo":  # the divergence of the two-valued distributions, eq. 13
        far = abs(math.exp(log_p.item()) - math.exp(old))
        falls = advantage < 0 and r < 1 and far > s.epsilon
        rises = advantage > 0 and r > 1 and far > s.epsilon_high
        return 0.0 if falls or rises else rho * advantage, falls, rises
    clipped = min(max(r, low), high) * advantage
    term = rho * advantage if r * advantage <= clipped else clipped
    return term, advantage < 0 and r < low, advantage > 0 and r > high


def stare_weights(completions, numbers, s):
    """(completion, t) -> omega."""
    tokens = [(c, t) for c in completions for t in written(c)]
    omega = dict.fromkeys(tokens, 1.0)
    if not tokens or sum(numbers[c][1][t] for c, t in tokens) / len(tokens) >= s.target_entropy:
        return omega
    for sign, weight in zip((1, -1), s.stare, strict=True):
        ordered = sorted(
            ((c, t) for c, t in tokens if sign * c.advantage > 0),
            key=lambda key: numbers[key[0]][0][key[1]],
        )
        for key in ordered[: math.ceil(s.surprising * len(ordered))]:
            omega[key] = weight
    return omega


def weight_of_token(completion, completions, kept, s):
    counted = kept if s.renormalize else {(c, t) for c in completions for t in written(c)}
    if s.aggregation == "token-mean":
        return 1 / len(counted)
    if s.aggregation == "constant":
        return 1 / (len(completions) * s.max_length)
    own = sum(1 for c, _ in counted if c is completion)
    return 1 / own / len({c for c, _ in counted})


def loss_and_metrics(
    model, completions, temperature, s, *, old=None, mask_from=None, reference=None
):
    """(loss with gradient, metrics); `old` and `mask_from` are statistics of another policy than
    the model's."""
    model = double(model)
    now = statistics(model, completions, temperature)
    kept, silenced, tau_h = masks(completions, mask_from or now, s)
    omega = stare_weights(completions, mask_from or now, s)
    if s.silence is None:
        tau_h = masks([c for c in completions if c.advantage != 0], now, s)[2]
    total, count, mass = 0.0, Counter(), Counter()
    sums, trained = Counter(), 0
    for c in completions:
        logits = token_logits(model, c, temperature)
        base = (
            None
            if reference is None
            else torch.log_softmax(token_logits(reference, c, temperature), -1).detach()
        )
        old_logprobs = c.rollout_logprobs if s.old_is_rollout else (old or now)[c][0]
        gaps = [(old or now)[c][0][t] - c.rollout_logprobs[t] for t in range(len(c.token_ids))]
        policy_terms = []
        all_log_p = torch.log_softmax(logits, -1)
        chosen = {t: all_log_p[t, c.token_ids[t]] for t in written(c)}
        rho = ratios(chosen, old_logprobs, written(c), s.token_loss)
        for t in written(c):
            token, log_p = c.token_ids[t], all_log_p[t]
            p = log_p.exp()
            entropy = -(p * log_p).sum()
            term, too_low, too_high = policy_term(
                rho[t], log_p[token], old_logprobs[t], c.advantage, s
            )
            term = omega[c, t] * term
            product = math.exp(sum(gaps[i] for i in written(c)))
            importance = {
                "token-truncate": math.exp(gaps[t]),
                "icepop": math.exp(gaps[t]),
                "sequence-mask": product,
                "off": 1.0,
            }[s.correction]
            capped = importance > s.cap or (s.correction == "icepop" and importance < 1 / s.cap)
            if capped:
                importance = s.cap if s.correction == "token-truncate" else 0.0
            policy_terms.append(importance * term)
            kl = 0.0
            if base is not None:
                difference = base[t, token] - log_p[token]
                kl = difference.exp() - difference - 1
            if (c, t) in kept:
                weight = weight_of_token(c, completions, kept, s)
                total = total - weight * (
                    importance * term - s.beta * kl + s.entropy_coef * entropy
                )
                sums["kl"] += kl.item() if base is not None else 0.0
            if c.advantage != 0:
                count["capped"] += capped
                sums["entropy"] += entropy.item()
                sums["collision"] += (p * p).sum().item()
                sums["gap"] += abs(gaps[t])
                sums["gap_k3"] += math.exp(gaps[t]) - gaps[t] - 1
                if (c, t) in kept:
                    trained += 1
                    sums["clipped_low"] += too_low
                    sums["clipped_high"] += too_high
        if c.advantage == 0:
            continue
        surrogate = sum(policy_terms)
        norms = torch.zeros(len(c.token_ids))
        if isinstance(surrogate, torch.Tensor):  # else every token is clipped
            norms = torch.autograd.grad(surrogate, logits, retain_graph=True)[0].norm(dim=-1)
        for t in written(c):
            norm = norms[t].item()
            source = mask_from if mask_from and s.silence and c.advantage > 0 else now
            p, h = math.exp(source[c][0][t]), source[c][1][t]
            holding = {
                "active": True,
                "candidate": c.advantage > 0 and p < s.tau_p,
                "spurious": c.advantage > 0 and p < s.tau_p and h < tau_h,
                "negative_rare": c.advantage < 0 and p < s.tau_p and h < tau_h,
                "negative_sure": c.advantage < 0 and 1 - p < s.tau_p,
            }
            for kind, holds in holding.items():
                count[kind] += holds
                mass[kind] += norm * holds
            if (c, t) in kept:
                sums["logit_grad_norm"] += norm
    active, tokens = count["active"], sum(len(written(c)) for c in completions)
    parts = {  # metric -> its sum and the number of values
        "loss": (total.item(), 1),
        "tau_h": (tau_h, tau_h > -math.inf),
        "kept_share": (len(kept), tokens),
        "silenced_share": (len(silenced), tokens),
        "amplified_share": (sum(weight != 1 for weight in omega.values()), tokens),
        "entropy": (sums["entropy"], active),
        "collision": (sums["collision"], active),
        "sampler_gap_mean": (sums["gap"], active),
        "sampler_gap_k3": (sums["gap_k3"], active),
        "sampler_capped_share": (count["capped"], active),
        "clip_low_share": (sums["clipped_low"], trained),
        "clip_high_share": (sums["clipped_high"], trained),
        "logit_grad_norm": (sums["logit_grad_norm"], trained),
    }
    if reference is not None:
        parts["kl"] = (sums["kl"], len(kept))
    for kind in ("candidate", "spurious", "negative_rare", "negative_sure"):
        parts[f"{kind}_share"] = (count[kind], tokens)
        parts[f"{kind}_gradient_share"] = (mass[kind], mass["active"])
    metrics = {name: part / number if number else None for name, (part, number) in parts.items()}
    trainable = [p for p in model.parameters() if p.requires_grad]
    return metrics, torch.cat([g.flatten() for g in torch.autograd.grad(total, trainable)])
