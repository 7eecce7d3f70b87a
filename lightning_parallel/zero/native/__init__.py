"""This library's own engine: parameters in flat buckets, of which every rank owns an equal part."""
