"""A recommender on sharded tables: clicks and ratings (LR, FM, DeepFM, DCN-v2, DLRM), and retrieval by two towers."""
