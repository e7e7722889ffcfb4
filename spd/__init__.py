"""Listwise LLM reranking by single pass decoding (arXiv 2609.01807)."""

__version__ = "0.1.0"
