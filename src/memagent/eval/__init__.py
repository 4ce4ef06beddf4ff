"""Evaluation: methods asked many questions, scored answers, reports with intervals; failures count as wrong.

Not here: graders (`rewards`), tasks and datasets (`data`), the reader itself (`agent`).
"""
