"""The user's step run as one stage: what is called, what comes in and what is handed on."""
