"""Pictures with captions, from wherever they are."""
