"""The master: experiments, searches and trials, kept, steered and scheduled."""
