"""Small image files, and datasets of them in every format that is read."""

import csv
import io

import numpy as np
import webdataset
from PIL import Image

COLOURS = ("red", "lime", "blue", "yellow", "cyan", "magenta", "black", "white")


def encode_image(colour="red", shape=(12, 8), *, mode="RGB", kind="PNG", **options):
    data = io.BytesIO()
    Image.new("RGB", shape, colour).convert(mode).save(data, kind, **options)
    return data.getvalue()


def noise_image(shape=(64, 48), *, kind="PNG", seed=0, **options):
    data = io.BytesIO()
    pixels = np.random.default_rng(seed).integers(0, 256, (*shape, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(data, kind, **options)
    return data.getvalue()


def sample(number, **more):
    """A sample as img2dataset writes it. Its colour shows its number, up to 8."""
    caption = f"a {COLOURS[number % 8]} thing"
    image = encode_image(COLOURS[number % 8])
    return {"__key__": f"{number:09d}", "png": image, "txt": caption, "json": {"caption": f"json {caption}"}, **more}


def write_tars(folder, counts=(5, 3), make=sample):
    """Write 00000.tar, … with the real webdataset, with these numbers of samples."""
    paths, number = [], 0
    for shard, count in enumerate(counts):
        paths.append(folder / f"{shard:05d}.tar")
        with webdataset.TarWriter(str(paths[-1])) as writer:
            for _ in range(count):
                writer.write(make(number))
                number += 1
    return paths


def write_csv(path, rows, header=("image", "caption"), **options):
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, **options).writerows([header, *rows])
    return path


def write_parquet(path, samples, *, row_group_size=3, **columns):
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.array([{"bytes": s["png"], "path": s["__key__"] + ".png"} for s in samples])
    table = pa.table({"image": image, "caption": [s["txt"] for s in samples], **columns})
    pq.write_table(table, path, row_group_size=row_group_size)
    return path


def colours_of(batch):
    """The numbers of the colours in a batch, by the pixel in the middle."""
    known = {Image.new("RGB", (1, 1), colour).getpixel((0, 0)): number for number, colour in enumerate(COLOURS)}
    middle = batch.images.shape[-1] // 2
    return [known[tuple(image[:, middle, middle].tolist())] for image in batch.images]
