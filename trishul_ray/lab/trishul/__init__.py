"""Extensions of TRISHUL and RAVAN: methods with names of their own."""
