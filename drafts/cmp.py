"""old (argv) vs new: run in subprocess? load both packages under different names"""
