"""`memagent doctor`: what works on this machine, and what to run for what does not.

examination.py    everything that is looked at, and what was found

It only looks: engines are in `engines`, profiles in `memagent.profiles`, and what is printed in `cli/tools`.
"""
