"""The scores that others have published under the same protocols, to compare a run with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from unisono_models.recommender.config import Config, DataConfig

# RecBole 1.2, benchmark/md/ml-1m_context.md and its results: embeddings of 16, random 8:1:1, best of a search by validation.
CONTEXT = {
    "lr": {"auc": 0.8699, "log_loss": 0.3488},
    "fm": {"auc": 0.8935, "log_loss": 0.3262},
    "dcn": {"auc": 0.8994, "log_loss": 0.3164},
    "deepfm": {"auc": 0.8997, "log_loss": 0.3150},
}
# RecBole-GNN, results/general/ml-1m.md: embeddings of 64, 8:1:1 of each user, full sort.
GENERAL = {
    "BPR": {"ndcg@10": 0.2407, "recall@10": 0.1725},
    "LightGCN": {"ndcg@10": 0.2538, "recall@10": 0.1861, "hit@10": 0.7330, "mrr@10": 0.4388, "precision@10": 0.1863},
}
CLICKS = ("auc", "log_loss", "accuracy", "rate", "predicted_rate", "rows", "bad_rows")
RANKING = ("ndcg@10", "recall@10", "hit@10", "mrr@10", "precision@10", "recall@50", "users")


def published_rows(config: Config, figures: Mapping[str, float]) -> list[dict[str, Any]]:
    """A row for each figure of the test, beside what is published for it, where the protocol is the same."""
    columns: dict[str, Mapping[str, float]] = {}
    if protocol_of(config.data) == "context" and config.model.kind in CONTEXT:
        columns = {f"published ({config.model.kind})": CONTEXT[config.model.kind]}
    elif protocol_of(config.data) == "general" and config.model.kind == "two_tower":
        columns = {f"published ({name})": scores for name, scores in GENERAL.items()}
    rows = []
    for name in RANKING if config.model.kind == "two_tower" else CLICKS:
        if f"test/{name}" in figures:
            others = {column: scores.get(name, "") for column, scores in columns.items()}
            rows.append({"figure": name, "this run": figures[f"test/{name}"], **others})
    return rows


def protocol_of(data: DataConfig) -> str:
    """ "context" or "general" if the data is that of RecBole's protocol of this name on ml-1m, or nothing."""
    if data.source != "ml-1m" or data.parts != (0.8, 0.1, 0.1):
        return ""
    if (data.keep, data.threshold, data.split) == ("[0,3);(3,inf)", 4.0, "rows"):
        return "context"
    return "general" if (data.keep, data.split) == ("[3,inf)", "per_user") else ""
