"""Small atomic files for tests, with every kind of bad row."""

from unisono_models.recommender.data.features import parse_features

FILES = {
    "x.inter": "user_id:token\titem_id:token\trating:float\thour:float\n"
    "b\tJaws\t5\t1\na\tAlien\t2\t2\n\nb\tAlien\tgood\t3\na\tJaws\t4\na\tHeat\t3\t0.5\n\tHeat\t3\t0\nb\tHeat\t1\tnan\na\tJaws\t4\t7\r\n",
    "x.user": "user_id:token\tage:float\nb\t33\nzoe\t20\na\t44\nb\t99\n",
    "x.item": "item_id:token\tgenre:token_seq\tweight:float\nAlien\tHorror Sci-Fi\t1.5\nJaws\tHorror\t\n",
}


COLUMNS = {"user": "user_id", "item": "item_id", "value": "rating"}


FEATURES = parse_features(["user_id", "item_id", "age:id", "genre", "hour", "weight:number"])


def write_rating_files(folder):
    for name, text in FILES.items():
        (folder / name).write_bytes(text.encode())
    return folder
