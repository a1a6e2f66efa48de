from dataclasses import dataclass
from unisono.embedding.layouts import Layout


@dataclass
class Plan:
    layouts: dict


def plan_tables(tables, world_size, **k):
    return Plan({t.name: Layout.table(i % world_size) for i, t in enumerate(tables)})
