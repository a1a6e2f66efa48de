"""Criteo files for tests, and what was read from them in a form to compare."""

from unisono.embedding import Ragged
from unisono_models.recommender.data.batch import Batch
from unisono_models.recommender.data.criteo import HEX_COLUMNS, INTEGER_COLUMNS, CriteoChunks, index_lines
from unisono_models.recommender.data.features import Feature

CLICK_FEATURES = (Feature("I2", "number"), Feature("C26", "id", 50), Feature("I1", "number"), Feature("C1", "id", 100))


def line(label="1", **fields):
    return "\t".join([label, *(str(fields.get(name, "")) for name in (*INTEGER_COLUMNS, *HEX_COLUMNS))])


def write_lines(path, lines, end="\n", last="\n"):
    path.write_bytes(end.join(lines).encode("latin-1") + (last.encode() if lines else b""))
    return path


def criteo_chunks(paths, features=CLICK_FEATURES, lines_per_chunk=4):
    paths = [paths] if not isinstance(paths, list) else paths
    return CriteoChunks(paths, features, index=index_lines(paths, lines_per_chunk=lines_per_chunk))


def read_all(chunks):
    return Batch.cat([chunks.read(chunk, 0, size) for chunk, size in enumerate(chunks.sizes.tolist())])


def rows_of(batch):
    """Everything about each row, to compare and to sort."""
    ids = [
        x.tolist() if not isinstance(x, Ragged) else [b.tolist() for b in x.values.split(x.lengths().tolist())]
        for x in batch.ids.values()
    ]
    return list(zip(batch.index.tolist(), batch.labels.tolist(), batch.numbers.tolist(), *ids, strict=True))
