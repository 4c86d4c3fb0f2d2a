"""Ranking losses, which compare the rows of a group.

A group has rows with scores s and grades g >= 0, such as the candidates of a query. P are its pairs (i, j) with g_i >
g_j. All rows of a group are in one sample, so a loss never depends on other groups:

    ranknet   sum over P of log(1 + exp(s_j - s_i)), divided by the number of pairs
    listnet   cross entropy of softmax(g) and softmax(s), divided by the number of groups
    lambda    sum over P of |delta nDCG_ij| x log(1 + exp(s_j - s_i)), divided by the number of groups

Here |delta nDCG_ij| = |2^g_i - 2^g_j| x |1 / log2(1 + r_i) - 1 / log2(1 + r_j)| / ideal DCG is how much nDCG changes if
rows i and j exchange their ranks r. It has no gradient. A group whose grades are all equal counts nothing.

Sources: RankNet, Burges et al. 2005 (https://doi.org/10.1145/1102351.1102363). ListNet with top-one probabilities, Cao
et al. 2007 (https://doi.org/10.1145/1273496.1273513). LambdaRank, Burges 2010 (Microsoft Research MSR-TR-2010-82), as a
loss in Wang et al. 2018 (https://doi.org/10.1145/3269206.3271784).

Shape legend: G groups, C rows of the group that has most.
"""

from collections import Counter
from collections.abc import Sequence
from math import comb
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from bert_tasks.outputs.logits import NO_LOGIT

RankingLoss = Literal["none", "ranknet", "listnet", "lambda"]
ABSENT_GRADE = -1.0  # instead of a grade, in a group with fewer rows than others


def ranking_loss(name: RankingLoss, scores: Tensor, grades: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the total of a ranking loss and its count, both 0-dimensional.

    Args:
        name: The loss.
        scores: ``[G, C]`` with ``NO_LOGIT`` if a group has fewer rows than others.
        grades: ``[G, C]`` float64, from 0, with ``ABSENT_GRADE`` instead.
    """
    is_row = grades >= 0
    # An absent row has the lowest grade of all, so it must not be the worse row of a pair.
    is_pair = (grades.unsqueeze(2) > grades.unsqueeze(1)) & is_row.unsqueeze(1)  # [G, C, C] i is better than j
    has_pairs = is_pair.flatten(1).any(dim=1).to(scores.dtype)  # [G]
    if name == "listnet":
        targets = grades.masked_fill(~is_row, NO_LOGIT).softmax(dim=1).to(scores.dtype)
        entropy = -(targets * scores.log_softmax(dim=1)).sum(dim=1)
        return (entropy * has_pairs).sum(), has_pairs.sum()
    pairs = is_pair.to(scores.dtype)
    losses = -F.logsigmoid(scores.unsqueeze(2) - scores.unsqueeze(1))  # log(1 + exp(s_j - s_i))
    if name == "ranknet":
        return (losses * pairs).sum(), pairs.sum()
    return (losses * pairs * ndcg_changes(scores.detach(), grades)).sum(), has_pairs.sum()


def ndcg_changes(scores: Tensor, grades: Tensor) -> Tensor:
    """Returns how much nDCG changes if two rows exchange their ranks.

    ``[G, C], [G, C] -> [G, C, C]``. The later one of two rows with equal scores has the better rank, as in
    ``ranking_metrics``.
    """
    numbers = torch.arange(scores.shape[1], device=scores.device)
    mine, other = scores.unsqueeze(2), scores.unsqueeze(1)
    is_before = (other > mine) | ((other == mine) & (numbers > numbers.unsqueeze(1)))
    discounts = 1 / torch.log2(2 + is_before.sum(dim=2).to(scores.dtype))
    # 2^g - 1, divided by 2^(the highest grade), which cancels out and cannot overflow.
    top = grades.amax(dim=1, keepdim=True)
    gains = (torch.exp2(grades.clamp(min=0) - top) - torch.exp2(-top)).to(scores.dtype)
    ideal = gains.sort(dim=1, descending=True).values / torch.log2(2 + numbers.to(scores.dtype))
    tiny = torch.finfo(scores.dtype).tiny  # for a group without a relevant row, which has no pairs
    gain_changes = (gains.unsqueeze(2) - gains.unsqueeze(1)).abs()  # [G, C, C]
    discount_changes = (discounts.unsqueeze(2) - discounts.unsqueeze(1)).abs()  # [G, C, C]
    return gain_changes * discount_changes / ideal.sum(dim=1).clamp(min=tiny).view(-1, 1, 1)


def ranking_count(name: RankingLoss, grades: Sequence[float]) -> int:
    """Returns the count of a loss for one group, from the grades alone."""
    # All pairs of rows, without the pairs of rows with the same grade.
    pairs = comb(len(grades), 2) - sum(comb(count, 2) for count in Counter(grades).values())
    if name == "ranknet":
        return pairs
    return min(pairs, 1)
