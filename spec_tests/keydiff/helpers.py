"""What several files of the laws of keydiff use."""

from evictionary.spec_tests.judge.prelude import *

paper_budgets = st.sampled_from([2048, 8192, 4096, 6144])


def one_over_norm(keys):
    return 1 / np.sqrt(np.einsum("...d,...d->...", keys, keys))


def mean_direction(impl, keys):
    """The mean of `k / |k|`, added part by part, and what its channels may be wrong by: errors of many
    keys add up by squares.
    """
    parts = in_parts(
        lambda part, weight: np.stack([part * weight, (part * weight) ** 2, np.abs(part * weight)]).sum(
            axis=-2
        ),
        keys,
        one_over_norm(keys)[..., None],
    )
    return sum(parts)[0] / keys.shape[-2], sum_errors(impl, keys.shape[-2], *sum(parts)) / keys.shape[-2]


def scores_in_parts(impl, keys):
    """The score of many keys, the anchor added part by part, and what it may be wrong by."""
    khat = keys * one_over_norm(keys)[..., None]
    mu, error = mean_direction(impl, keys)
    length = np.linalg.norm(mu, axis=-1, keepdims=True)
    muhat, error = (mu / length)[..., None, :], (error / length)[..., None, :]
    cosines = (khat @ np.swapaxes(muhat, -1, -2))[..., 0]
    # A cosine is a logit of two unit vectors, but for the root; muhat has the error of mu, and that of its
    # length.
    slack = np.sqrt(keys.shape[-1]) * logit_errors(impl, muhat, khat)[..., 0, :]
    slack += 2 * np.sqrt((khat**2 * error**2).sum(axis=-1)) + 2 * np.abs(cosines) * np.sqrt(
        (muhat**2 * error**2).sum(axis=-1)
    )
    return -cosines, slack
