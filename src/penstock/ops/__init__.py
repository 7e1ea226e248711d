"""Operator actions: what people ask about a running pipeline."""
