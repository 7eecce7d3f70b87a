"""ZeRO: what data-parallel ranks need not all hold, and what it costs to hold it once. Imports torch, never Lightning.

``accounting`` has the paper's formulas. ``layout`` says which elements of which bucket belong to which rank; the other
modules move them: gradients by reduce-scatter while the backward runs, parameters by all-gather after the step.
"""
